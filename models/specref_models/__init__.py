"The weights and texts of specref's embedded models: files alone, no code"
