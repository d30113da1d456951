"""train: `python -m train CONFIG` trains a mixture-of-experts language model on text, on one device or on pods."""
