"""Where checkpoints come from: one function per source, each writes a Hugging Face folder. Heavy imports wait for the call."""
