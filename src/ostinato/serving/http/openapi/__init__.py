"""What ``/openapi.json`` says about answers: their bodies, and which errors each route has."""
