#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| onelayer_fuzz::gguf::check(data));
