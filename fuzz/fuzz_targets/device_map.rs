#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| onelayer_fuzz::device_map::check(data));
