"""Training of the demo draft: self-made data, draft, loss, optimiser and the loop."""
