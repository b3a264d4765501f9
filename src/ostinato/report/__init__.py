"""Reports of a run: what an engine's graphs did, as a file and as a page that stands alone."""
