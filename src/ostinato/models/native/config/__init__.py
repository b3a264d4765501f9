"""What a checkpoint's config says, as options of the native decoder."""
