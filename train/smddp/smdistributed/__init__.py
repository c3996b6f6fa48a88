"""The name under which SageMaker's libraries are imported; found only where `train/smddp` is on the path.

Holds nothing. It must not hide a real installation further down the path: what is missing here is looked for there.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
