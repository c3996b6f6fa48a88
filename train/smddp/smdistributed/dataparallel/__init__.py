"""SageMaker's distributed data parallel library, version 1, for PyTorch only.

Holds nothing. It must not hide a real installation further down the path: what is missing here is looked for there.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
