"""Programs that made what the project ships; nothing of the project imports them."""
