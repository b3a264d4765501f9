"""SwiftKV: a decoder whose late layers run only for the tokens whose logits are wanted."""
