//! The choice of GPUs that serve as rails, and refused options.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Driver, GpuError, RailOptions, Rails, uuid_text};

fn chosen(text: &str) -> Result<Vec<u32>, GpuError> {
    let driver = FakeDriver::new(FakeOptions { devices: 3, ..FakeOptions::default() }).unwrap();
    let options = RailOptions { choice: text.parse()?, ..RailOptions::default() };
    Ok(Rails::new(Arc::new(driver), &[], options)?.chosen())
}

#[test]
fn gpus_are_named_by_ordinal_or_uuid() {
    assert_eq!(chosen("auto").unwrap(), [0, 1, 2]);
    assert_eq!(chosen("off").unwrap(), [0u32; 0]);
    assert_eq!(chosen("2, 0").unwrap(), [0, 2]);
    let driver = FakeDriver::new(FakeOptions::default()).unwrap();
    let second = uuid_text(driver.devices().unwrap()[1].uuid);
    assert_eq!(chosen(&format!("0,{second}")).unwrap(), [0, 1]);
}

#[test]
fn what_is_no_gpu_is_named() {
    assert_eq!(chosen("0,7"), Err(GpuError::NoSuchDevice("7".into())));
    assert_eq!(chosen("GPU-0"), Err(GpuError::NoSuchDevice("GPU-0".into())));
    for text in ["", "on", "1,,2", "auto,1", "-1"] {
        assert!(matches!(chosen(text), Err(GpuError::Invalid(said)) if said.contains(&format!("'{text}'"))));
    }
}

#[test]
fn a_ring_that_holds_nothing_is_refused() {
    let driver: Arc<dyn Driver> = Arc::new(FakeDriver::new(FakeOptions::default()).unwrap());
    let sound = RailOptions::default();
    for options in [
        RailOptions { slots: 0, ..sound.clone() },
        RailOptions { slot_bytes: 0, ..sound.clone() },
        RailOptions { slot_bytes: 24, ..sound.clone() },
        RailOptions { blocks: 0, ..sound },
    ] {
        assert!(matches!(Rails::new(Arc::clone(&driver), &[], options), Err(GpuError::Invalid(_))));
    }
}
