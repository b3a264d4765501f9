"""``/v1/responses``, for plain text: nothing is stored."""
