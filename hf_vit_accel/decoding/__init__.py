"""`graphed_decoding`: the steps of one token that follow a prompt, on a static cache. Knows nothing of towers."""
