"""``ostinato bench core``: what the library costs and saves, apart from any runtime."""
