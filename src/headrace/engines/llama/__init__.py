"""The embedded engine: libllama does the arithmetic, headrace decides every step."""
