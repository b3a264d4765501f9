"""SwiftKV: a decoder whose late layers run only for tokens that need logits."""
