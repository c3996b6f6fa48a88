"""The name under which SageMaker's libraries are imported; found only where `train/smddp` is on the path.

Empty, and extends its path so that a real installation further down the path is still found.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
