"""WHERE STATE RESTS ELSEWHERE: host memory, files, streams beside the computation, the master."""
