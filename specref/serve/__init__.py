"Serving: where speculation pays, by the bytes and operations of a pass"
