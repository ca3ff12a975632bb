//! A CUDA driver over host memory, for tests on machines without a GPU.
//!
//! **What it is.** The part of the driver API that statecopy uses, under its exported names, as a library to be opened in
//! place of `libcuda.so.1`. Memory is files in a folder that several processes share, streams are threads, and the
//! product's kernels are written here once more, row by row. The other half, [`Stub`], is a test's side: it makes the
//! folder, asks for faults while processes run, and reads what each process did and still holds.
//!
//! **What it is not.** It is no emulator: it runs no code of an image and knows only the five kernels of statecopy and the one of its native workers. It
//! proves the order of calls, clean-up and faults, and never speed. What NVIDIA's header leaves open is answered here as
//! well as is known; a device has the last word, and `answers.py` asks it the same questions.
//!
//! **Invariant.** Memory that a kernel may not touch is `CUDA_ERROR_ILLEGAL_ADDRESS`, for good, and never a crash of the
//! stub. After that error nothing on any stream is done, and no word says that it was.
//!
//! The same library stands in for NVRTC where a test asks for it ([`Stub::provide_compiler`]): its code names the chip that
//! it is for, and the driver refuses it on another.
//!
//! A process finds the folder by `STATECOPY_STUB_CUDA_DIR` ([`Stub::environment`]); without it there is no device. It sees
//! the devices of the folder, or others in another order by `STATECOPY_STUB_CUDA_DEVICES` ([`StubDevice::describe`]).

mod abi;
mod attributes;
mod captures;
mod compiler;
mod connections;
mod control;
mod devices;
mod events;
mod exports;
mod functions;
mod graphs;
mod ipc;
mod kernels;
mod ledger;
mod mapping;
mod memory;
mod modules;
mod process;
mod streams;
mod stub;
mod sync;
mod trace;
mod vmm;
mod words;

pub use abi::CUresult;
pub use control::{Act, Fault, Knob, Whose};
pub use devices::StubDevice;
pub use functions::Function;
pub use stub::{Entered, Stub, stub_library};
pub use trace::{CallRecord, Object, ProcessReport};
pub use vmm::GRANULARITY_BYTES;
