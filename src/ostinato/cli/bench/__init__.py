"""``ostinato bench``: measurements, as tables or JSON."""
