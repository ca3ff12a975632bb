"""The page of documentation, as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[4] / "docs" / "vllm.md"


def run(**given: Any) -> dict[str, Any]:
    """Runs every snippet of the page, in one namespace in which the names that it takes from vLLM are given."""
    names = dict(given)
    for at, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)):
        exec(compile(snippet, f"{PAGE.name}, snippet {at + 1}", "exec"), names)
    return names
