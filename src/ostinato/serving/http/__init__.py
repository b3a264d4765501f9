"""OpenAI's routes over HTTP, around an ``AsyncLLM``: needs ``ostinato[serve]``."""
