"""From a corpus on disk to batches of speech: corpora, the store, text, audio, populations and loading."""
