"""The PostgreSQL engine: stateless gateways over one database (docs/design/0010-postgres.md)."""
