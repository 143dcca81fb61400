"""The only room that decides: when to save, from what to resume, how to leave."""
