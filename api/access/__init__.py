"""Who is let in, what each may ask for, and what belongs to whom."""
