"""Print what bpipe's plans show of published claims, or write docs/published.md."""

from __future__ import annotations

import argparse

from benchmarks.published.page import CLAIMS, PAGE, page, section_of


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("claims", nargs="*", metavar="claim", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/published.md instead")
    given = parser.parse_args()
    if unknown := sorted(set(given.claims) - set(names)):
        parser.error(f"there is no claim {', '.join(unknown)}: choose of {', '.join(names)}")
    if given.write:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote docs/{PAGE.name}")
    elif given.claims:
        print("\n".join(section_of(claim) for claim in CLAIMS if claim.name in given.claims))
    else:
        print(page())


if __name__ == "__main__":
    main()
