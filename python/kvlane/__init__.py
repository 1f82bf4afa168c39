"""kvlane keeps the KV cache of vLLM engines in a daemon, so that it outlives them and is shared by all of a host.

`kvlane.connector` is vLLM's connector, `kvlane._core` the Rust side, `kvlane.testing` stand-ins for the daemon and
for engines. Importing `kvlane` alone imports neither torch nor vLLM.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvlane")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__"]
