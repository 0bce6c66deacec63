"""From text that people have to token shards that training reads."""
