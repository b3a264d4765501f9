"""Models whose weights are split over ranks."""
