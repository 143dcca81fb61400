"""What the ranks that are left still save after others have died."""
