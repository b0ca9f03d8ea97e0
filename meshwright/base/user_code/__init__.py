"""Names of the user's functions (`module:function`), and the objects that they return."""
