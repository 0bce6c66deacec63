"""Programs and timelines in other forms: text, torch's CSV, Chrome trace, pictures."""
