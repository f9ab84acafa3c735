"""Where the demo pair lies."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEMO_DRAFT", "DEMO_TARGET"]

DEMO_TARGET = Path("~/.cache/dflash-serve/smollm2-135m-instruct").expanduser()
DEMO_DRAFT = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "draft"
