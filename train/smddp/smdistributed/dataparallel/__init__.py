"""SageMaker's distributed data parallel library, version 1, for PyTorch only.

Empty, and extends its path so that a real installation further down the path is still found.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
