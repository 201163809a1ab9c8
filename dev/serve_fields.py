"""Writes the table of request fields to docs/reference/serving_fields.md; --check compares it."""

from __future__ import annotations

import sys
from pathlib import Path

from bmforge.serve.fields import ENDPOINTS, treatment_of

PAGE = Path("docs/reference/serving_fields.md")
HEAD = """# Fields of requests

This page lists how `bmforge serve` treats each request field of each endpoint. A field that is
not in the table returns status 400 with the name of the field. `dev/serve_fields.py` generates
this page.

- **supported**: the field has the effect that its protocol documents. An invalid value returns
  status 400.
- **no effect**: the field is an identifier or a hint that cannot change the response.
- **neutral value only**: only the value that means "off" is accepted. Any other value returns
  status 400. This holds for many fields of vLLM and llama.cpp, so that their clients can send
  the defaults; the table lists the accepted values and the reason.

"""


def write_page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for endpoint, model in ENDPOINTS.items():
        lines += [f"## {endpoint}\n\n", "| field | treatment |\n|---|---|\n"]
        for name, field in model.model_fields.items():
            lines.append(f"| `{field.alias or name}` | {treatment_of(endpoint, name)} |\n")
        for name, neutral in getattr(model, "neutral_fields", {}).items():
            values, reason = neutral.allowed, neutral.reason
            treatment = "no effect" if neutral.is_hint else f"neutral value only (`{values}`)"
            lines.append(f"| `{name}` | {treatment}: {reason} |\n")
        lines.append("\n")
    return "".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with --check return 1 if the file differs."""
    page = write_page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
