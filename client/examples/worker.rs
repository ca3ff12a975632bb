//! A worker in its shortest form: share a cache, register its layers, and run one prefill step.
//!
//! Start a daemon (`statecopyd serve`), then `cargo run --example worker -p statecopy-client`. `STATECOPY_ADDR` names the
//! daemon's socket or runtime directory where it is not in its usual place.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example tells what it did")]

use std::process::ExitCode;

use statecopy_client::blocking::Client;
use statecopy_client::{
    Address, ConnectOptions, DataType, Error, Flags, Indices, Layer, RefusalCode, Registration,
    Request, Strides, Use,
};

/// Rows of the cache, of which at most `SELECTED_MAX` are copied by one request.
const ROWS: u64 = 16;
const SELECTED_MAX: u64 = 4;
/// One state, `[H, V, K]`, and a page that also holds other things: the gap is never read and never written.
const SHAPE: [u64; 4] = [ROWS, 2, 32, 32];
const PAYLOAD_BYTES: usize = 2 * 32 * 32 * 4;
const PAGE_ELEMENTS: u64 = 3 * 2 * 32 * 32;

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    match &error {
        Error::Refused(refusal) => eprintln!("{refusal}"),
        other => eprintln!("{other}. {}", other.remedy()),
    }
    ExitCode::from(error.code().map_or(3, RefusalCode::exit_code))
}

fn run() -> Result<(), Error> {
    let options = ConnectOptions { label: "example worker".to_owned(), ..Default::default() };
    let client = Client::connect(Address::from_env()?, options)?;

    // Memory of this process. The daemon maps it too; pages are paid for here.
    let layers = ["layers.0", "layers.1"];
    let cache_bytes = ROWS * PAGE_ELEMENTS * 4;
    let cache = client.allocate("cache", layers.len() as u64 * cache_bytes)?;
    let packed = client.allocate("packed", 1 << 20)?;
    let cache_region = client.register_region(&cache, Use::Cache)?;
    let packed_region = client.register_region(&packed, Use::Packed)?;

    // Prepare, seal and publish: all layers, or none.
    let mut registration = Registration::new().set("linear attention", layers);
    for (at, name) in layers.iter().enumerate() {
        registration = registration.layer(Layer {
            name: (*name).to_owned(),
            dtype: DataType::Float32,
            shape: SHAPE,
            strides: Strides::PageStride(PAGE_ELEMENTS),
            region: cache_region.clone(),
            offset_bytes: at as u64 * cache_bytes,
            max_selected: SELECTED_MAX,
            check_unique: false,
        });
    }
    let bindings = client.register(&registration, |progress| println!("{progress:?}"))?;
    let plan = bindings.layer("layers.1")?;

    // Row 5 continues a sequence, row 9 begins one, -1 is padding.
    let row = |index: u64| cache_bytes + index * PAGE_ELEMENTS * 4;
    cache.write(row(5), &[7; PAYLOAD_BYTES])?;
    cache.write(row(9), &[3; PAYLOAD_BYTES])?;
    let indices = [5, 9, -1];
    let step = || Request::new(Indices::Int32(&indices), packed_region.at(0)).lane(0);
    let moved = plan.gather(step().flags(Flags::Bools(&[true, false, true])))?;
    println!("gathered {} rows, cleared {}", moved.copied, moved.masked);
    let states = packed.read_vec(0, 3 * PAYLOAD_BYTES)?;
    assert!(states[..PAYLOAD_BYTES].iter().all(|byte| *byte == 7), "row 5 has its state");
    assert!(states[PAYLOAD_BYTES..].iter().all(|byte| *byte == 0), "the rest begins at zero");

    // The chunk maths would stand here; its final states lie where the initial ones lay.
    packed.fill(0, 3 * PAYLOAD_BYTES as u64, 8)?;
    let moved = plan.scatter(step())?;
    println!("scattered {} rows, skipped {}", moved.copied, moved.masked);
    for index in [5, 9] {
        assert_eq!(cache.read_vec(row(index), PAYLOAD_BYTES)?, [8; PAYLOAD_BYTES]);
    }
    client.close()
}
