"""WHAT IS DECIDED BEFORE A BYTE IS ALLOCATED: lane keys, places, lane specs."""
