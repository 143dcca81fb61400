"""Process dumps as an attempt meets them: what goes into one, who hears of it, and its copies."""
