//! What the client does when the daemon restarts, stays silent or answers wrongly, shown against a fake daemon. Everything
//! that a real daemon can show is tested end to end elsewhere.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calls;
mod fake;
mod lives;

use std::path::Path;
use std::time::Duration;

use fake::Fake;
use statecopy_client::blocking::{Bindings, Client};
use statecopy_client::{
    ConnectOptions, DataType, Indices, Layer, Region, Registration, Request, Strides, Use,
};
use tempfile::TempDir;

const ROWS: u64 = 8;
const PAYLOAD: u64 = 2 * 4 * 4;
const PAGE: u64 = 4096;

/// A worker with two layers in one region and a packed region.
struct Worker {
    client: Client,
    cache: Region,
    packed: Region,
    bindings: Bindings,
}

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn options() -> ConnectOptions {
    ConnectOptions {
        label: "rank 0".to_owned(),
        wait_for: Duration::from_secs(10),
        call_timeout: Duration::from_secs(10),
        // Long, so that a test shows who waits for it that should not.
        copy_slack: Duration::from_secs(30),
        ..ConnectOptions::default()
    }
}

fn layer(name: &str, region: &Region, offset_bytes: u64) -> Layer {
    Layer {
        name: name.to_owned(),
        dtype: DataType::Float32,
        shape: [ROWS, 2, 4, 4],
        strides: Strides::PageStride(PAGE / 4),
        region: region.clone(),
        offset_bytes,
        max_selected: 4,
        check_unique: false,
    }
}

fn registration(region: &Region) -> Registration {
    Registration::new()
        .layer(layer("a", region, 0))
        .layer(layer("b", region, PAYLOAD * 4))
        .set("both", ["a", "b"])
}

impl Worker {
    fn start(daemon: &Fake, options: ConnectOptions) -> Self {
        let client = Client::connect(daemon.address(), options).unwrap();
        let cache = client.allocate("cache", ROWS * PAGE).unwrap();
        let packed = client.allocate("packed", 4 * PAGE).unwrap();
        let cache = client.register_region(&cache, Use::Cache).unwrap();
        let packed = client.register_region(&packed, Use::Packed).unwrap();
        let bindings = client.register(&registration(&cache), |_| {}).unwrap();
        Self { client, cache, packed, bindings }
    }

    fn request(&self) -> Request<'static> {
        Request::new(Indices::Int32(&[1, 2, -1]), self.packed.at(64))
    }
}

/// A daemon in that directory and a worker of it.
fn pair(directory: &Path) -> (Fake, Worker) {
    let daemon = Fake::start(directory, 1);
    let worker = Worker::start(&daemon, options());
    (daemon, worker)
}
