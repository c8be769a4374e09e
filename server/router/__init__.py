"""`jaxserve route`: one OpenAI address in front of many workers."""
