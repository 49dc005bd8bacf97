"""/api/admin and the dashboard: what operators read and change."""
