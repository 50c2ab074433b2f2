"""Put the generated tables into the documentation; with --check, only say whether they are up to date."""

import re
import sys
from pathlib import Path

from hvdlite.diagnose import TABLES
from hvdlite.horovod_compat.differences import DIFFERENCES, GONE

DOCS = Path(__file__).resolve().parent
MARK = re.compile(r"(<!-- python -m hvdlite.diagnose --markdown (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
DIFFER = re.compile(r"(<!-- differences that hvdrun --horovod-check knows -->\n).*?(<!-- end -->)", re.DOTALL)


def differences_table() -> str:
    """Return what `hvdrun --horovod-check` says of names that exist, in Markdown."""
    tables = (("fails", GONE), ("differs", DIFFERENCES))
    rows = [f"| `{name}` | {effect} | {text} |" for effect, table in tables for name, text in table]
    return "\n".join(["| name | | why |", "|---|---|---|", *rows])


def main() -> int:
    """Return 1 when --check finds a page that is out of date."""
    stale = []
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        new = MARK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)
        new = DIFFER.sub(lambda match: f"{match[1]}{differences_table()}\n{match[2]}", new)
        if new != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
