"""The demo pair: a small public target and a DFlash draft trained for it."""
