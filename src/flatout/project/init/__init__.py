"""Create conf/local from the user's data (`kedro flatout init`)."""
