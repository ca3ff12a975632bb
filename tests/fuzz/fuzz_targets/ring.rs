//! The executor against a hostile worker: see `statecopyd::device_process::hostile`.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use statecopyd::device_process::hostile::Arena;

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::new(Arena::new());
}

fuzz_target!(|input: &[u8]| {
    ARENA.with_borrow_mut(|arena| arena.run(input));
});
