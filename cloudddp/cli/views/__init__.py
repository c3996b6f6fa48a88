"""Results as text for people and as JSON with stable keys for programs (docs/json.md). Pure."""
