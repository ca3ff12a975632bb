//! A CUDA device that fails, over the stub driver: who is told what, and who serves next.

use statecopy_client::{DataType, Error, Layer, Leaves, RefusalCode, Registration, Strides};
use statecopy_proto::Refusal;
use statecopy_stub_cuda::{Act, CUresult, Fault, Function, Whose};
use statecopy_tests::{CudaBed, CudaWorker, Daemon, PIECES, until};

fn refusal(error: Error) -> Refusal {
    match error {
        Error::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn wait_for_restart(daemon: &Daemon, restarts: u64) {
    until("the next device process serves", || {
        let device = &daemon.inspect().devices[0];
        device.ready && device.restarts == restarts
    });
}

#[test]
fn a_copy_under_which_the_device_fails_is_lost_and_the_next_device_process_knows_every_binding() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(8 << 20, PIECES));
    let mut other = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    worker.copy_both_ways();
    let failed = daemon.device_process();
    bed.stub.fault_next_kernel(Some(Whose::Process(failed)));
    let error = worker.try_copy_both_ways().unwrap_err();
    assert_eq!(error.leaves(), Leaves::Unknown);
    assert_eq!(refusal(error).code(), RefusalCode::DeviceLost);
    wait_for_restart(&daemon, 1);
    worker.copy_both_ways();
    other.copy_both_ways();
    let log = daemon.log();
    assert!(log.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{log}");
    // What is no longer of use is left alone: the device may still write.
    let report = bed.report(failed);
    assert!(report.held().iter().any(|(_, count)| *count > 0), "{report:?}");
}

#[test]
fn a_device_that_fails_while_nothing_runs_is_noticed_without_a_copy() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    let sticky = Fault::next(Act::Answer(CUresult::ILLEGAL_ADDRESS));
    bed.stub.arm(Function::cuStreamQuery, sticky.of(daemon.device_process()));
    wait_for_restart(&daemon, 1);
    worker.copy_both_ways();
}

#[test]
fn a_device_that_fails_under_a_registration_is_followed_by_one_that_takes_it() {
    let bed = CudaBed::default();
    let daemon = bed.daemon().start();
    let mut worker = CudaWorker::register(&bed, bed.client(&daemon), bed.allocate(1 << 20, PIECES));
    let client = bed.client(&daemon);
    let memory = bed.allocate(1 << 20, PIECES);
    let at = client.register_device_memory(memory.address(), memory.bytes()).unwrap();
    let registration = Registration::new().layer(Layer {
        name: "layers.1".to_owned(),
        dtype: DataType::BFloat16,
        shape: [4, 1, 1, 8],
        strides: Strides::PageStride(16),
        region: at.region.clone(),
        offset_bytes: at.offset,
        max_selected: 4,
        check_unique: false,
    });
    let sticky = Fault::next(Act::Answer(CUresult::ILLEGAL_ADDRESS));
    bed.stub.arm(Function::cuModuleLoadData, sticky.of(daemon.device_process()));
    let refused = refusal(client.register(&registration, |_| {}).unwrap_err());
    assert_eq!(refused.code(), RefusalCode::DeviceLost, "{refused}");
    wait_for_restart(&daemon, 1);
    client.register(&registration, |_| {}).unwrap();
    worker.copy_both_ways();
}
