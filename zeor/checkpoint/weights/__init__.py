"""Plain safetensors, as others write and read them: pretrained weights in, exports out."""
