"""Makes docs/live-page.png: the daemon's live page after a minute of requests to three models.

    python bench/live_page/picture.py [PROGRAM] [--seconds N] [--out FILE]

PROGRAM is the kvlane to show, the one beside this Python if none is given. The requests and their order are always the
same. Rates and times are those of the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from programs import ROOT, chromium, daemon, traffic

from kvlane.bench.processes import beside_python

BYTES_MAX = 250_000
WIDTH = 1280


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", nargs="?", default=None)
    parser.add_argument("--seconds", type=float, default=60.0, help="of requests (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/live-page.png")
    settings = parser.parse_args()
    program = settings.program or beside_python("kvlane")
    with daemon(program) as shown, traffic(shown.address, per_second=20), chromium() as browser:
        time.sleep(settings.seconds)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(f"http://{shown.page}/")
        page.locator("#state", has_text="ok").wait_for()
        data = page.screenshot(full_page=True)
    if len(data) > BYTES_MAX:
        sys.exit(f"the picture has {len(data)} bytes, more than {BYTES_MAX}")
    settings.out.write_bytes(data)
    print(f"written: {settings.out.name}, {len(data)} bytes")


if __name__ == "__main__":
    main()
