"""`python -m asyncrl.models NAME`: resolves the model and prints its folder as the last line of stdout.

Progress goes to stderr. What is wrong with NAME stands in place of the folder, with exit code 2. The launcher
runs it as a subprocess.
"""

from __future__ import annotations

import sys

from asyncrl.errors import ConfigError
from asyncrl.models.source import resolve_model


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m asyncrl.models NAME", file=sys.stderr)
        return 2
    try:
        print(resolve_model(sys.argv[1]))
    except ConfigError as error:
        print(" ".join(str(error).split()))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
