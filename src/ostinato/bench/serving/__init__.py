"""``ostinato bench serve``: what a server does with requests at random times."""
